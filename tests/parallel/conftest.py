import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Eight ranks for the whole session."""
    with Pool() as ranks:
        yield ranks
