"""Training with an unchanged script of one process: `hvdrun --auto -np 4 python train.py`.

`python -m sirtaki.auto SCRIPT ARGUMENTS` makes a process a rank and runs the script in it as `__main__`. This
package imports no framework; `sirtaki.torch.auto` and `sirtaki.keras.auto` do their parts once the script has
imported theirs.
"""
