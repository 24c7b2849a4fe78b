"""The table of adaptations on streams: which samples pass, and what a cell says."""

from types import SimpleNamespace

import numpy as np
import plan
import streams

from fedjax_bn.data.domain import Domain, Split


def test_both_streams_have_the_same_samples_and_one_is_sorted_by_class():
    labels = np.arange(400, dtype=np.int32) % 7
    split = Split(np.full((400, 4, 4, 3), labels[:, None, None, None], np.uint8), labels)
    experiment = SimpleNamespace(unseen=(Domain("new", None, None, split),))
    random, by_class = streams.streams(experiment, 0).values()
    assert len(random.labels) == streams.LENGTH
    np.testing.assert_array_equal(np.sort(random.labels), by_class.labels)
    assert (np.diff(random.labels) < 0).any()
    np.testing.assert_array_equal(by_class.images[:, 0, 0, 0], by_class.labels)


def test_every_setting_has_a_valid_configuration():
    for setting in streams.SETTINGS.values():
        plan.configuration(setting.config, setting.changes)
