"""One module per family of routes; each turns a body into GenerationRequests and Chunks into an answer."""
