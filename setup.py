"""What pyproject.toml cannot say: the top-level recipes/ is installed inside the package that reads it."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["rpft", "rpft.*"]), "rpft.recipe.shipped_files"],
    package_dir={"rpft.recipe.shipped_files": "recipes"},
    package_data={
        "rpft.recipe.shipped_files": ["*.yaml"],
        "rpft.data": ["templates/*.jinja"],
        "rpft.optim": ["*.cpp"],
        "rpft.plan": ["machines/*.yaml", "models/*.yaml"],
    },
)
