"""A database for a study, in which the trials of workers that died are tried again. Importing it imports Optuna."""

import time
import warnings

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.exc import DatabaseError

# Seconds between two signs of life, and without one until a worker counts as dead. A machine that slept for a while must not:
# its trial would have failed behind its back, which Optuna takes for an error.
HEARTBEAT_INTERVAL, GRACE_PERIOD = 60, 600
MAX_RETRIES = 3


class HeartbeatStorage(RDBStorage):
    """
    While a trial runs, its worker gives signs of life. If they stop, because the worker was killed, the next worker that
    begins a trial lets that one fail, and its hyperparameters are tried once more.

    :param url: URL of the database, as SQLAlchemy understands it
    """

    def __init__(self, url: str):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            super().__init__(
                url,
                heartbeat_interval=HEARTBEAT_INTERVAL,
                grace_period=GRACE_PERIOD,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES),
            )

    def endswith(self, suffix: str) -> bool:
        """RL Zoo asks what it takes for a name whether it is that of a journal (``".log"``)."""
        return False


def open_storage(url: str, attempts: int = 10) -> HeartbeatStorage:
    """
    Optuna makes its tables in an empty database, and raises in a worker that does so at the same time as another one.

    :param url: URL of the database, as SQLAlchemy understands it
    :param attempts: Number of tries, one a second
    """
    for attempt in range(attempts):
        try:
            return HeartbeatStorage(url)
        except DatabaseError as error:
            if attempt == attempts - 1 or not any(words in str(error) for words in ("already exists", "duplicate", "locked")):
                raise
            time.sleep(1)
    raise AssertionError


def fail_stale_trials(storage: HeartbeatStorage, study_name: str | None) -> None:
    """
    Let the trials of dead workers fail, and be tried again.

    :param storage: Database of the study
    :param study_name: Name of the study, which need not exist yet
    """
    if study_name not in optuna.get_all_study_names(storage):
        return
    study = optuna.load_study(study_name=study_name, storage=storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
