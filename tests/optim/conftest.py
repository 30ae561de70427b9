import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Four ranks for the whole session."""
    with Pool(4) as ranks:
        yield ranks
