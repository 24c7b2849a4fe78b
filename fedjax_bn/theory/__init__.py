"""The theory of FedBN and UniFed in numbers: kernels, eigenvalues, rates, bounds, figures."""

from fedjax_bn.theory import bounds as bounds
from fedjax_bn.theory.convergence import Course as Course
from fedjax_bn.theory.convergence import Data as Data
from fedjax_bn.theory.convergence import Network as Network
from fedjax_bn.theory.convergence import data_from as data_from
from fedjax_bn.theory.convergence import evolution as evolution
from fedjax_bn.theory.convergence import gram as gram
from fedjax_bn.theory.convergence import initialize as initialize
from fedjax_bn.theory.convergence import least_eigenvalue as least_eigenvalue
from fedjax_bn.theory.convergence import predict as predict
from fedjax_bn.theory.convergence import predicted as predicted
from fedjax_bn.theory.convergence import race as race
from fedjax_bn.theory.convergence import same_client as same_client
from fedjax_bn.theory.convergence import sampled_gram as sampled_gram
from fedjax_bn.theory.convergence import train as train
