"""`.gguf` files, as shards read models and the loader reads adapters from them."""
