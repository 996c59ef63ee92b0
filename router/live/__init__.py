"""What the server does now, for pages that show it."""
