"""Training with an unchanged single-process script: `hvdrun --auto -np 4 python train.py`.

`python -m sirtaki.auto SCRIPT ARGUMENTS` makes a process a rank and runs the script in it as `__main__`. This
package imports no framework; `sirtaki.torch.auto` and `sirtaki.keras.auto` start once the script has imported
their framework.
"""
