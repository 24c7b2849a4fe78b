"""Methods that the papers compare with, one file each; `fedjax_bn.methods` exports them too."""
