"""Compare the nodes of a job before it trains: what each has, and the links between each two of them."""
