import pytest

from hyla_core.attention import normalize, values
from hyla_core.attention.variants import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_names_functions(name):
    assert callable(getattr(normalize, VARIANTS[name].normalize))
    assert callable(getattr(values, VARIANTS[name].values))


def test_no_two_variants_are_the_same():
    assert len(set(VARIANTS.values())) == len(VARIANTS)
