from headway.rollout.gateway import main
import sys
