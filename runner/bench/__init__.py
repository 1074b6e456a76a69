"""`sirtaki bench`: measures collectives, beside the machine's limit and beside other libraries."""
