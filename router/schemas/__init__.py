"""Request bodies: readers with the rules and error texts of each route, and the models that publish the schema."""
