"""Readers of bodies of other APIs for conversations: each becomes the body of a chat completion."""
