"""Programs that train the models of ``models`` with ``keras_dp``."""
