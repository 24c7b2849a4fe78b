"""Adds a network's first tensors, as PyTorch draws them, to a task's file.

python -m peer_programs.first_tensors NETWORK FILE
"""

import sys
from pathlib import Path

import torch

from peer_programs.in_pytorch import new_network
from peer_programs.rounds import read, write

if __name__ == "__main__":
    torch.manual_seed(0)
    arrays, _ = read(sys.argv[2])
    tensors = {name: value.numpy() for name, value in new_network(sys.argv[1]).state_dict().items()}
    write(Path(sys.argv[2]), arrays, tensors)
