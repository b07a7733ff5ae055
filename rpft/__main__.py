"""`python -m rpft` is `rpft`."""

from rpft.cli import main

if __name__ == "__main__":
    main()
