"""The process and its machine: compiled C libraries, CPU affinity, logs."""
