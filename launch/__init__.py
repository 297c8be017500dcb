"""`hvdrun`: starts a command on many ranks through the MPI that is installed. Imports neither MPI nor a framework."""
