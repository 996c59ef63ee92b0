"""Chat templates: rendering them, and those of untrusted authors in processes that can be killed."""
