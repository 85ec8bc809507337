import pytest

pytest.register_assert_rewrite("tests.e2e.command", "tests.e2e.reference")
