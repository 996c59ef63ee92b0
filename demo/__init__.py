"""The built-in demo models and the scripts that train and measure them. No part of the server imports this package."""
