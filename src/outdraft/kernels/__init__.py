"""Every operation that is computed in more than one way, and the table that says in which."""
