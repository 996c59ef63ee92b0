"""What operators are told of every request that has ended. Nothing here makes a request wait."""
