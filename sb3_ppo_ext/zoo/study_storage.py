"""Database storage for a study, which retries the trials of workers that died. Importing it imports Optuna."""

import time
import warnings

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from sqlalchemy.exc import DatabaseError

# Parts of the messages of databases in which another worker creates the tables at the same time
OF_ANOTHER_WORKER = ("already exists", "duplicate", "locked", "UNIQUE constraint failed: alembic_version")
# Seconds between two heartbeats, and seconds without a heartbeat after which a worker counts as dead. The latter is long: if a
# machine slept for a while, its trial must not be marked as failed meanwhile, because Optuna would then raise an error in it.
HEARTBEAT_INTERVAL, GRACE_PERIOD = 60, 600
MAX_RETRIES = 3


class HeartbeatStorage(RDBStorage):
    """
    While a trial runs, its worker sends heartbeats. If they stop, because the worker was killed, the next worker that begins a
    trial marks that one as failed, and its hyperparameters are tried again.

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
        """RL Zoo expects the name of the storage, and checks whether it is that of a journal (``".log"``)."""
        return False


def open_storage(url: str, attempts: int = 10) -> HeartbeatStorage:
    """
    Open a database, with several attempts: Optuna creates its tables in an empty database, and raises in a worker that does so
    at the same time as another one.

    :param url: URL of the database, as SQLAlchemy understands it
    :param attempts: Maximum number of attempts, one per second
    :return: Storage in this database
    """
    for attempt in range(attempts):
        try:
            return HeartbeatStorage(url)
        except DatabaseError as error:
            if attempt == attempts - 1 or not any(words in str(error) for words in OF_ANOTHER_WORKER):
                raise
            time.sleep(1)
    raise AssertionError


def fail_stale_trials(storage: HeartbeatStorage, study_name: str | None) -> None:
    """
    Mark the trials of dead workers as failed, so that they are tried again.

    :param storage: Database of the study
    :param study_name: Name of the study, which need not exist yet
    """
    if study_name not in optuna.get_all_study_names(storage):
        return
    study = optuna.load_study(study_name=study_name, storage=storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)
