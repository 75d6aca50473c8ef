"""The processes: own sockets, rings, children and signals; run the core's actions. They do not decide."""
