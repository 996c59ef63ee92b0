"""The loader's process: brings adapters from their sources into the store, for the router that asks over a socket.

`server` speaks with the router, `jobs` decides what is done once and what first, `readers` keeps the processes that do
the work (`reader`, forked from `nursery`, where the libraries and the base's skeleton are loaded once).
"""
