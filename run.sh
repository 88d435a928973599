cd /tmp/s2/cov; export PYTHONPATH=/tmp/s2/cov:/tmp/s2/covlib OMP_NUM_THREADS=1
for d in verdict results comparison bench; do
COVERAGE_FILE=/tmp/s2/cov/.cov.$d nice -n 12 .venv/bin/python -m coverage run --rcfile=.coveragerc -m pytest -q -p no:cacheprovider tests/$d > /tmp/s2/cov/log.$d 2>&1
done
