"""The one installed package: links to the top-level folders, so that all of them import as `lorikeet.<folder>`."""
