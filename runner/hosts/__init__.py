"""Other hosts: the agents that run ranks there, and the frames between hvdrun and agents."""
