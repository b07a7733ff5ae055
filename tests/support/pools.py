"""What takes the place of a pool of processes, each of which would cost seconds of imports."""


class NoProcesses:
    """Opens and closes as a ProcessPoolExecutor does; what ``submit`` does is up to the test."""

    def __init__(self, *arguments, **more):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass
