import random
import statistics

from benchmarks.memory import draw_lengths, measure


def test_paging_wastes_under_4_percent_and_reserving_the_maximum_over_60():
    report = measure(requests=300, progress=False)
    assert report.paged_waste < 0.04
    assert report.reserved_waste > 0.60


def test_larger_blocks_waste_more():
    assert (
        measure(requests=100, block_size=128, progress=False).paged_waste
        > 2 * measure(requests=100, block_size=16, progress=False).paged_waste
    )


def test_lengths_have_the_means_asked_for():
    rng = random.Random(0)
    prompts, outputs = zip(*[draw_lengths(rng, 1155, 211, 10**6) for _ in range(20_000)], strict=True)
    assert abs(statistics.mean(prompts) / 1155 - 1) < 0.05
    assert abs(statistics.mean(outputs) / 211 - 1) < 0.05
