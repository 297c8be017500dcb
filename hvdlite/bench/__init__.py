"""`python -m hvdlite.bench`: how fast collectives and training are here, and how fast a larger job would be.

Not part of the core: it sees `hvdlite` as users do, and frameworks and peers only where it measures them.
"""
