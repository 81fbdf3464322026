"""The launch arithmetic of the Triton kernels, which needs neither a device nor triton."""

import pytest
import torch

from opd.kernels import grid

CPU = torch.device("cpu")


class Recorder:
    """Stands where a kernel does: keeps the shape of the grid and what the kernel is told of it."""

    shape: tuple[int, ...] = ()

    def __getitem__(self, shape: tuple[int, ...]):
        self.shape = shape
        return self

    def __call__(self, *args, **options) -> None:
        self.options = options


@pytest.fixture
def device(monkeypatch):
    """Blocks and slices as on a device of 132 processors."""
    monkeypatch.setattr(grid, "interpreted", lambda: False)
    monkeypatch.setattr(grid, "_num_processors", lambda device: 132)


def columns(made: grid.Grid, vocab: int) -> list[int]:
    """Of one row, in the order of its programs and their tiles."""
    starts = [part * made.width + tile for part in range(made.num_slices) for tile in range(0, made.width, made.block)]
    return [column for start in starts for column in range(start, min(start + made.block, vocab))]


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 4096, 5000, 151_936])
@pytest.mark.parametrize("num_rows", [1, 7, 131, 264, 528, 529, 8192])
@pytest.mark.usefixtures("device")
def test_every_column_belongs_to_one_program(num_rows, vocab):
    for made in (grid.slices(num_rows, vocab, CPU), grid.tiles(num_rows, vocab)):
        assert columns(made, vocab) == list(range(vocab))
        assert made.block & (made.block - 1) == made.width % made.block == 0
        assert (made.num_slices - 1) * made.width < vocab  # none without a column
        assert made.num_programs == num_rows * made.num_slices


@pytest.mark.usefixtures("device")
def test_few_rows_are_cut_and_many_are_not():
    assert grid.slices(1, 151_936, CPU).num_slices == 38  # a tile each
    assert grid.slices(100, 151_936, CPU).num_slices == 8
    assert [grid.slices(num_rows, 151_936, CPU).num_slices for num_rows in (528, 8192, 70_000)] == [1, 1, 1]
    assert grid.slices(1, 1000, CPU).num_slices == 1


@pytest.mark.usefixtures("device")
def test_tiles_fit_the_registers_of_a_device():
    for vocab in (1, 5000, 32_768, 151_936, 1_000_000):
        assert 128 <= grid.tiles(1, vocab).block <= 4096


@pytest.mark.parametrize("num_rows", [65_535, 65_536, 70_000])
@pytest.mark.usefixtures("device")
def test_more_rows_than_a_second_dimension_takes(num_rows):
    """All programs lie along the first dimension, which takes 2^31 - 1."""
    tensor = torch.zeros(1)
    made = {
        grid.tiles(num_rows, 151_936): num_rows * 38,
        grid.slices(num_rows, 151_936, CPU): num_rows,
        grid.entries(num_rows, 65): num_rows * 2,
    }
    for programs, number in made.items():
        kernel = Recorder()
        programs.launch(kernel, tensor, vocab=151_936)
        assert kernel.shape == (number,)
        assert kernel.options["num_slices"] * num_rows == number


def test_no_rows_no_launch():
    for empty in (grid.tiles(0, 5000), grid.slices(0, 5000, CPU), grid.entries(0, 4), grid.entries(5, 0)):
        kernel = Recorder()
        empty.launch(kernel, torch.zeros(1))
        assert kernel.shape == ()


def test_what_no_grid_takes_is_refused():
    with pytest.raises(AssertionError, match="hand over fewer rows at once"):
        grid.Grid(2**26, 4096, 38, 4096).launch(Recorder(), torch.zeros(1))


def test_columns_that_do_not_lie_next_to_each_other_are_refused():
    grid.check_columns(torch.zeros(4, 6)[::2, 1:5], torch.zeros(6, 1).T[:, :1])
    with pytest.raises(AssertionError, match="next to each other"):
        grid.check_columns(torch.zeros(6, 4).T)
