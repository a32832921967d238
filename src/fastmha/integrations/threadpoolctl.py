"""fastmha's threads under threadpoolctl, as one more library beside BLAS and OpenMP."""

import threadpoolctl

import fastmha

__all__ = ["register"]


class _Controller(threadpoolctl.LibController):
    user_api = internal_api = "fastmha"
    filename_prefixes = ("_team",)
    check_symbols = ("fastmha_get_num_threads", "fastmha_set_num_threads")

    def get_num_threads(self):
        return self.dynlib.fastmha_get_num_threads()

    def set_num_threads(self, num_threads):
        return self.dynlib.fastmha_set_num_threads(num_threads)

    def get_version(self):
        return fastmha.__version__


def register():
    """Make fastmha's threads known to threadpoolctl.

    After it, `threadpoolctl.threadpool_limits` limits them together with all others, or alone with
    ``user_api="fastmha"``; libraries that set limits for their workers, such as joblib and
    scikit-learn, thereby set them for fastmha. Calling it again does nothing.

    Raises
    ------
    ImportError
        On import of the module, without threadpoolctl 3.4 or later.

    Examples
    --------
    >>> import fastmha
    >>> from fastmha.integrations import threadpoolctl as integration
    >>> from threadpoolctl import threadpool_limits
    >>> integration.register()
    >>> with threadpool_limits(1):
    ...     fastmha.get_num_threads()
    1
    """
    threadpoolctl.register(_Controller)
