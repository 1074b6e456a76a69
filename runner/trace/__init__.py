"""`sirtaki trace`: joins the timelines of all ranks on a common clock, and reports what is slow."""
