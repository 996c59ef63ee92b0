"""What clients may write: readers with the rules and texts of each route, and models that publish the schema."""
