"""Between the socket and the application: connections, their limits and time limits, and the addresses of clients."""
