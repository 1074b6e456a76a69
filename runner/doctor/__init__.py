"""`sirtaki doctor`: gathers facts about hosts and the network between them, and judges them by rules."""
