"""`python -m fedjax_bn`: the command line."""

from fedjax_bn.main import command

command()
