"""All methods by name: those of `fedjax_bn.methods`, and those of other papers in `contrib`."""

from fedjax_bn import contrib, methods

METHODS = {name: getattr(module, name) for module in (methods, contrib) for name in module.__all__}
