"""What runs in the ranks while a benchmark beside this folder gives the orders."""
