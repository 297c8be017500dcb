"""What Horovod's frameworks have in common, under Horovod's names."""
