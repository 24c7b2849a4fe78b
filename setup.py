"""Names the packages: `configs/` lies beside the library and goes into it when it is built."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["fedjax_bn*"]), "fedjax_bn.configs"],
    package_dir={"fedjax_bn.configs": "configs"},
)
