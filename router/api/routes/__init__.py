"""One module per family of routes; each turns a body into a GenerationRequest and Chunks into an answer."""
