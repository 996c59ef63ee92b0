"""This server next to llama.cpp's on the same processor: rounded weights, and adapters."""
