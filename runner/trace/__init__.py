"""`sirtaki trace`: joins the timelines of all ranks on one clock, and reports what is slow."""
