"""The loader's process: downloads adapters and writes them to the store, for the router that calls it over a socket.

`server` answers the router, `jobs` schedules and deduplicates, `workers` manages the processes that do the work
(`worker`, forked by the process of `workers`, which loads the libraries and the base's skeleton once).
"""
