"""FedBN on ABIDE I (Li et al. 2021, Section 5.2 and D.4): four hospitals, patients from controls.

    python -m fedjax_bn.main --config configs/abide.py --config.data.path=FOLDER

The clients are the paper's four sites, NYU, USM, UM_1 and UCLA_1, even if the folder has more;
--config.data.domains=NYU,PITT takes these, and --config.data.domains= takes all that have series.

FOLDER holds the phenotypic table and the regions' time series of one atlas, laid out as in
fedjax_bn/data/sets/abide.py; its docstring also says how much memory they take. Every window
of 32 frames is a sample; the accuracy is that of single windows of subjects that no client trained
on. A sample has 111 x 110 / 2 = 6105 features with the Harvard-Oxford atlas as it is published, of
111 regions; the paper's 5995 are 110 x 109 / 2, see fedjax_bn/data/sets/abide.py.

The paper's Table 1 (50 epochs, Harvard-Oxford atlas, 88 + 167 + 52 + 63 subjects, 5 runs), accuracy
in percent:

              NYU   USM   UM    UCLA
    SingleSet 58.0  73.4  64.3  57.3
    FedAvg    62.7  73.1  70.7  64.7
    FedProx   63.3  73.0  70.5  64.5
    FedBN     65.6  75.1  68.6  65.5

    --config.method=fedavg    (fedprox, singleset)
    subjects, diagnoses and windows (Table 10): launch/pictures.py

The run is small without any change.
"""

from ml_collections import ConfigDict

from fedjax_bn.run.config import base, override


def get_config(changes: str = "") -> ConfigDict:
    config = base()
    config.method = "fedbn"
    config.model = "MLP"  # 16 and 16 hidden units
    config.rounds = 50
    config.local_epochs = 1
    config.batch_size = 100
    config.optimizer.learning_rate = 0.01
    config.weigh = "uniform"
    config.eval_every = 5
    config.data.name = "abide"
    config.data.domains = ("NYU", "USM", "UM_1", "UCLA_1")  # D.4, in the order of Table 1
    config.data.split = "stratified"  # the paper is silent; a fifth of the subjects tests
    config.data.validation = 0.0
    config.data.test = 0.2
    return override(config, changes)
