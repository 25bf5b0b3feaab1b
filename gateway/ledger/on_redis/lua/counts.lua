-- consumer or '', states
local answer = {'ok'}
for i = 3, #ARGV do answer[#answer + 1] = tally('trajectories', ARGV[i], ARGV[2]) end
return answer
