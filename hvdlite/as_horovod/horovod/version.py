"""The version of Horovod whose interface this is. Scripts compare it; hvdlite's own is `hvdlite.__version__`."""

__version__ = "0.28.1"
