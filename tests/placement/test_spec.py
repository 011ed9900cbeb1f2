from __future__ import annotations

from placement.spec import GroupSpec


def test_every_rank_has_a_bundle_and_the_first_also_holds_the_control_actor():
    spec = GroupSpec(num_ranks=3, num_cpus=2, num_gpus=1)
    assert spec.bundles == [{"CPU": 2.1, "GPU": 1}, {"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1}]


def test_bundle_names_only_what_is_asked_for():
    assert GroupSpec(num_ranks=2).bundles == [{"CPU": 1.1}, {"CPU": 1}]
    assert GroupSpec(num_ranks=2, num_cpus=0, num_gpus=0.5).bundles == [{"CPU": 0.1, "GPU": 0.5}, {"GPU": 0.5}]


def test_amounts_have_no_rounding_error():
    assert GroupSpec(num_cpus=0.2).bundles == [{"CPU": 0.3}]  # and not 0.30000000000000004, which Ray would round up


def test_accelerator_type_is_a_resource_of_every_bundle():
    assert all("accelerator_type:L4" in bundle for bundle in GroupSpec(num_ranks=2, accelerator_type="L4").bundles)


def test_label_selector_goes_to_every_bundle():
    spec = GroupSpec(num_ranks=2, label_selector={"pool": "decode"})
    assert spec.label_selectors == [{"pool": "decode"}] * 2
    assert GroupSpec().label_selectors is None
