"""Who may call, and how much of the gateway each caller gets: checked before anything of a request is read."""
